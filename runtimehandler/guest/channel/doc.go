// Package channel is the guest's end of the line to its host: a named virtio-serial port, which every hypervisor has, or
// a vsock listener.
//
// Both hand out net.Conns of which the other end is the host, and nobody else: a port belongs to root and is open once,
// and a vsock connection from within the guest is closed again.
package channel
