"""Anthropic's ``/v1/messages``, translated to chats and back."""
