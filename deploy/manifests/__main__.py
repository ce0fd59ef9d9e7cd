"""`python -m deploy.manifests`: writes the committed files of deploy/kubernetes/."""

from deploy.manifests.files import write

write()
