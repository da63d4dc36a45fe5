"""Sources of pods besides NRI and the objects directory: kubelet's pod list, the runtime's CRI.

Each source is a plain client with one blocking `fetch`, which `polling` calls periodically in a
worker thread, with back-off. Nothing here changes the state: the daemon applies the results.
"""
