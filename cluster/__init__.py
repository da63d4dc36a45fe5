"""The cluster side: manager, webhooks, scheduler, descheduler."""
