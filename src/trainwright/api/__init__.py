"""Entry points other than a config file and a subclass. Each adapts to the one loop; none has its own."""
