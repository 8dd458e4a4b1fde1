"""The output-length ranker, and dispatch that knows how long answers will be (arXiv 2504.15930, section 4.2).

`lengths` holds what was observed, `model` and `fit` learn from it, `cost` says what a decode step takes, `dispatch`
plans which instance answers what in which order.
"""
