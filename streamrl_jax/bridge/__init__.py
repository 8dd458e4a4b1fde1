"""Weights from trainer to generator: names, manifest, publishing, pulling."""
