// Package vm boots microVMs for tests of any package.
//
// A test says [Need] in its first line. [Start] boots a machine that ends with the test; when the test fails, its directory
// is kept, and the QEMU command line and the console are printed. [Main] runs a package's tests and fails if they leave
// something behind.
//
// The guest image is made once per test process from the kernel in CRUST_KERNEL_DIR (by default where the set-up program
// puts it) and the crust-agent of this tree; CRUST_GUEST_KERNEL and CRUST_GUEST_INITRD name another one. CRUST_ACCEL is kvm,
// tcg or auto.
package vm
