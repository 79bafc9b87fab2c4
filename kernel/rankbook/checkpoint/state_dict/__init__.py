"""Map local tensors and objects to shards of a global state dict."""
