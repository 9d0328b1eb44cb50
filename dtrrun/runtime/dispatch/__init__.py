"""How the program's operators reach the runtime, and how they are handled."""
