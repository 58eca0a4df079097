// Package download fetches a file over HTTP from a server that need not be honest, for somebody who need not be either.
//
// Whoever can name a URL must not thereby reach what only this machine can reach. So addresses are looked at when they are
// connected to, after the name was resolved, and for each redirect anew; proxies of the environment are not used, because
// the addresses would be looked at by them. What does not belong to the public Internet is refused unless the operator has
// listed it ([Config.AllowCIDRs], [Config.AllowHosts]).
//
// What comes is counted, timed, held against the space that is left, and hashed while it is written. A transfer that breaks
// off is carried on where it ended if the server proves that the file is still the same one, and otherwise begun again. The
// length that a server says is held against what it sends; a server that says none, in a way in which a broken connection
// looks like the end, is only believed with a checksum.
//
// Errors show a URL without its query, which may be what gives access to it.
package download
