"""The messages, errors, transports and discovery that frontend and workers share."""
