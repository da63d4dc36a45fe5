"""Sources of pods besides NRI and the objects directory: kubelet's pod list, the runtime's CRI.

Each source is a plain client with one blocking `fetch`, called in a worker thread, and `poll` turns
it into a loop with back-off. Nothing here touches the state; the daemon applies what comes.
"""
