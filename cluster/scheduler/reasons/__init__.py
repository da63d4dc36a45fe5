"""Why a pod is not placed, from the masks of all nodes."""
