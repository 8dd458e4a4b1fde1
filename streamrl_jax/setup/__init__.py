"""What a run prepares before its loop: inputs, devices, JAX, the instances and the generation side."""
