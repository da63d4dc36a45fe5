"""What every long-running process of the project needs: logs, the supervisor, its own figures."""
