"""What the launch scripts decide: how a run fits the nodes, whether these can work, and what its end means."""
