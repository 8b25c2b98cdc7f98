"""Many machines behind a router: which machine a request goes to, and a simulated cluster to see what comes of it."""
