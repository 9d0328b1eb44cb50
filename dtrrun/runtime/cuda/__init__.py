"""A session on a GPU: the allocator's budget, out-of-memory errors, streams and graphs."""
