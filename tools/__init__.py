"""Development tools: code generation and checks that CI runs."""
