"""What the subcommands of `streamrl` do: a module each, and what they alone need."""
