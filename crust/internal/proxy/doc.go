// Package proxy is the daemon as SP: it serves CSI to the CO (the kubelet) in the place of one driver.
//
// Six methods of the node service are its own, because a deferral needs them; everything else, known to it or not,
// unary or streaming, goes through to the driver byte by byte.
package proxy
