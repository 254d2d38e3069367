"""From what is known to a plan: tables, policies, and the processes that ask them."""
