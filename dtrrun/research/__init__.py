"""What the paper's reader needs, for `dtrrun simulate`: optimal plans of others, the theorems, figures."""
