"""Entry points other than a config file and a subclass. Each is an adapter to the one loop."""
