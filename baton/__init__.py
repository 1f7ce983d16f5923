"""The words and wires that frontend and workers share: messages, errors, transports, discovery."""
