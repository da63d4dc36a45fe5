"""What a scheduler is configured with: KubeSchedulerConfiguration v1, plugin arguments, flags."""
