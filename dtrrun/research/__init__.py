"""Parts of `dtrrun simulate` for readers of the paper: other authors' planners, the theorems, figures."""
