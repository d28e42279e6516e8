"""Memory below the device pool: pages and states move down under pressure and up again when somebody wants them."""
