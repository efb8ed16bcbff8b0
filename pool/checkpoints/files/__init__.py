"""Files and folders of weights, read without trusting them: every format becomes one `Header` of named tensors."""
