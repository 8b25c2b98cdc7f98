"""Multi-Task Zipping: trained models of one architecture come to share weights; ``zipping.zip_nets`` does it.

Modules import each other relatively: scripts of the folder above and the tests find this package under two names.
"""
