"""The command `dtrrun`: one file for each verb, and the options that they share."""
