"""Options of one run as frozen values: patches, sampler functions, wrappers, callbacks, injections."""
