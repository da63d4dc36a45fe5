"""What each long-running process needs: logs, its supervisor, sockets, figures, bounded YAML."""
