"""The strategies, one file each, and the rules that several of them share."""
