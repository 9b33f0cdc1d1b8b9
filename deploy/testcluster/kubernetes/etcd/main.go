// Command etcd is the store of the test cluster: one member, on loopback, for
// data that nobody minds losing. Kubernetes asks for an etcd server and its
// own modules already contain one as a library, so this file is all it takes.
package main

import (
	"flag"
	"log"
	"net/url"
	"os"
	"os/signal"
	"syscall"

	"go.etcd.io/etcd/server/v3/embed"
)

func main() {
	dir := flag.String("data-dir", "", "where the data lives")
	flag.Parse()
	if *dir == "" {
		log.Fatal("etcd: --data-dir is required")
	}
	if err := serve(*dir); err != nil {
		log.Fatalf("etcd: %v", err)
	}
}

func serve(dir string) error {
	config := embed.NewConfig()
	config.Dir = dir
	config.LogLevel = "warn"
	// A test cluster does not outlive its machine, so it need not wait for the disk.
	config.UnsafeNoFsync = true
	config.ListenClientUrls = loopback("2379")
	config.AdvertiseClientUrls = config.ListenClientUrls
	config.ListenPeerUrls = loopback("2380")
	config.AdvertisePeerUrls = config.ListenPeerUrls
	config.InitialCluster = config.InitialClusterFromName(config.Name)

	member, err := embed.StartEtcd(config)
	if err != nil {
		return err
	}
	defer member.Close()
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGINT, syscall.SIGTERM)
	select {
	case err := <-member.Err():
		return err
	case <-asked:
		return nil
	}
}

func loopback(port string) []url.URL {
	return []url.URL{{Scheme: "http", Host: "127.0.0.1:" + port}}
}
