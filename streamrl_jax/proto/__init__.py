"""The wire: `streamrl.proto` and the stubs that `make proto` generates from it."""
