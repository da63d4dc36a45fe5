"""ElasticQuota: admission of pods by quotas, and the pods that a quota has too many of."""
