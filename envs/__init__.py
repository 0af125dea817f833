"""The worlds, one file an environment. Only this package knows third-party game and sandbox libraries."""
