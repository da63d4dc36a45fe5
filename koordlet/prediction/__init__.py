"""What pods and classes will use: histograms that decay, and the peaks they predict."""
