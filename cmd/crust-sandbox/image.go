package main

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"crust.dev/crust/runtimehandler/qemu/image"
)

const (
	// defaultImageDir is where the guest's image is.
	defaultImageDir = "/var/cache/crust/image"
	// defaultKernelDir is where the set-up program unpacks the distribution's kernel package.
	defaultKernelDir = "/var/cache/crust/kernel"
)

func imageCommand(o *options) *cobra.Command {
	var kernelDir, agent, out, root string
	cmd := &cobra.Command{
		Use:   "image",
		Short: "Make the guest's image from a distribution's kernel package",
		Long: `image puts together what microVMs boot: the kernel out of a directory into which a kernel package was unpacked, and an
initramfs with the modules, tools and libraries that the guest needs and crust-agent as its init.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			kernel, err := image.FindKernel(kernelDir)
			if err != nil {
				return err
			}
			if agent, err = filepath.Abs(agent); err != nil {
				return err
			}
			start := time.Now()
			made, err := image.Ensure(cmd.Context(), image.Config{Agent: agent, Kernel: kernel, Root: root}, out)
			if err != nil {
				return err
			}
			raw, err := made.Save(out)
			if err != nil {
				return err
			}
			if o.output == "json" {
				fmt.Fprintln(cmd.OutOrStdout(), string(raw))
				return nil
			}
			info, err := os.Stat(made.Initrd)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s with %s, %d MiB, in %v\n", filepath.Base(made.Kernel), filepath.Base(made.Initrd), info.Size()>>20, time.Since(start).Round(time.Millisecond))
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&kernelDir, "kernel-dir", kernelDirFromEnvironment(), "directory into which a kernel package was unpacked (boot/vmlinuz-*, lib/modules)")
	flags.StringVar(&agent, "agent", "/usr/libexec/crust/crust-agent", "the agent, statically linked")
	flags.StringVar(&root, "tools-root", "/", "where mkfs, fsck and a shell are taken from")
	flags.StringVar(&out, "out", defaultImageDir, "where to put the image")
	return cmd
}

// kernelDirFromEnvironment is where the set-up program has put the kernel.
func kernelDirFromEnvironment() string {
	if dir := os.Getenv("CRUST_KERNEL_DIR"); dir != "" {
		return dir
	}
	if cache := os.Getenv("XDG_CACHE_HOME"); cache != "" {
		return filepath.Join(cache, "crust", "kernel")
	}
	return defaultKernelDir
}
