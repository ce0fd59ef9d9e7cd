"""`python -m deploy.docs`: writes all generated pages below docs/."""

from deploy.docs.pages import write

write()
