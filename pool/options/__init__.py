"""Per-run options as frozen values: patches, sampler functions, wrappers, callbacks, injections."""
