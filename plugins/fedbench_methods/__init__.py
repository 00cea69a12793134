"""The methods that ship with fedbench, one file each; found through entry points like any third party's."""
