"""Maps component names to classes: builtin.py has the table, resolve.py the lookup, catalogue.py the listing."""
