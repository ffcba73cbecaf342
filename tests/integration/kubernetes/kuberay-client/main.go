// One request of KubeRay's own client of the Jobs API, as its operator sends them:
//
//	kuberay-client -url URL [-token TOKEN] submit FILE | info ID | list | log ID | stop ID | delete ID
//
// FILE is a RayJob in YAML whose status.jobId is the submission id, as the operator sets it before it submits.
// The answer is printed as JSON; an error of the client goes to stderr, exit status 1.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"time"

	rayv1 "github.com/ray-project/kuberay/ray-operator/apis/ray/v1"
	"github.com/ray-project/kuberay/ray-operator/controllers/ray/utils/dashboardclient"
	"sigs.k8s.io/yaml"
)

// The operator's own limit for a request to a head.
const timeout = 2 * time.Second

func submit(ctx context.Context, c *dashboardclient.RayDashboardClient, path string) (any, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var job rayv1.RayJob
	if err := yaml.UnmarshalStrict(text, &job); err != nil {
		return nil, err
	}
	return c.SubmitJob(ctx, &job)
}

func ask(c *dashboardclient.RayDashboardClient, verb, word string) (any, error) {
	ctx := context.Background()
	switch verb {
	case "submit":
		return submit(ctx, c, word)
	case "info":
		return c.GetJobInfo(ctx, word)
	case "list":
		return c.ListJobs(ctx)
	case "log":
		return c.GetJobLog(ctx, word)
	case "stop":
		return nil, c.StopJob(ctx, word)
	case "delete":
		return nil, c.DeleteJob(ctx, word)
	}
	return nil, fmt.Errorf("no verb %q", verb)
}

func main() {
	url := flag.String("url", "", "of the head")
	token := flag.String("token", "", "")
	flag.Parse()
	c := &dashboardclient.RayDashboardClient{}
	c.InitClient(&http.Client{Timeout: timeout}, *url, *token)
	answer, err := ask(c, flag.Arg(0), flag.Arg(1))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := json.NewEncoder(os.Stdout).Encode(answer); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
