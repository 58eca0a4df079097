// Package image assembles what a microVM boots: a stock distribution kernel and an initramfs with crust-agent, the kernel
// modules it needs, the tools that make and check filesystems, and a few more for people.
//
// Everything is read from the machine that it runs on: a kernel package that was unpacked somewhere ([FindKernel]), and
// the tools and libraries of the distribution. Nothing is downloaded, nothing is executed, and the same inputs give the
// same bytes. [Ensure] keeps the result in a directory and makes it anew only when an input has changed.
package image
