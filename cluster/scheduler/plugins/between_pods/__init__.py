"""Where other pods are: affinity between pods, and spread over domains."""
