"""runtime.v1alpha1.RuntimeHookService: the proto file and the modules generated from it."""
