"""What goes into a run: prompts, examples, and the tokenizer that reads them."""

from streamrl_jax.data.prompts import Order, PromptSet, load_prompts

__all__ = ["Order", "PromptSet", "load_prompts"]
