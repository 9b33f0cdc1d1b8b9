use elasticdl_spec::resolve::{Inputs, resolve};

use super::*;

const FILE: &str = "
apiVersion: elasticdl.org/v1
kind: ElasticJob
metadata: { name: ctr }
spec:
  model: { zoo: lr }
  data: { train: a.tsv, layout: criteo }
  workers: { cpu: 500m, memory: 1Gi, gpu: 1, memory_limit: 2Gi, priority: 0.5 }
  servers: { cpu: 2, memory: 4Gi, pod: { spec: { terminationGracePeriodSeconds: 5, containers: [{ name: elasticdl, env: [{ name: MORE, value: x }] }] } } }
  kubernetes:
    image: registry.example.com/edl:1
    image_pull_secrets: [pull]
    node_selector: { disk: fast }
    tolerations: [{ key: spot, operator: Exists }]
    affinity: { nodeAffinity: {} }
    labels: { team: ads }
    annotations: { note: hello }
    env: { RUST_LOG: info }
    grace: 20s
    volumes:
      - { persistentVolumeClaim: { claimName: data }, mountPath: /data }
      - { name: more, configMap: { name: files }, mountPath: /files, readOnly: true }
";

fn job(flags: &[(&str, &str)]) -> Job {
    let flags = flags.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let spec = resolve(&Inputs { file: Some(FILE), flags, ..Inputs::default() }).unwrap().job;
    let owner = OwnerReference { name: "ctr-elasticdl".into(), uid: "u".into(), ..OwnerReference::default() };
    Job { spec, namespace: "ads".into(), run: "r1".into(), fresh: false, allowed: None, owner: Some(owner) }
}

fn member(role: Role) -> Member {
    let name = names::member("ctr", role, 3);
    Member { role, id: 3, launch: 77, name, master: "10.0.0.1:7070".into(), high: false, memory_deaths: 0 }
}

fn yaml(object: &impl serde::Serialize) -> String {
    serde_norway::to_string(object).unwrap()
}

#[test]
fn a_worker_is_a_pod_with_all_that_the_job_says() {
    insta::assert_snapshot!(yaml(&job(&[]).member(&member(Role::Worker)).unwrap()));
}

#[test]
fn a_server_is_a_pod_with_the_persons_own_words_laid_over() {
    let pod = job(&[]).member(&member(Role::Server)).unwrap();
    let spec = pod.spec.unwrap();
    assert_eq!(spec.termination_grace_period_seconds, Some(5));
    assert_eq!(spec.priority_class_name.as_deref(), Some(names::PRIORITY_SERVER));
    let [container] = &spec.containers[..] else { panic!("merged by name: {:?}", spec.containers) };
    let env = container.env.as_ref().unwrap();
    let names: Vec<&str> = env.iter().map(|e| e.name.as_str()).collect();
    assert!(names.contains(&"MORE") && names.contains(&"POD_IP") && names.contains(&"RUST_LOG"), "{names:?}");
    assert!(container.args.as_ref().unwrap().contains(&"$(POD_IP):7071".to_string()));
}

#[test]
fn the_master_is_a_pod_with_an_account_and_a_directory_of_the_run() {
    insta::assert_snapshot!(yaml(&job(&[]).master(2).unwrap()));
}

#[test]
fn memory_grows_with_deaths_and_the_limit_with_it() {
    let of = |deaths| {
        let member = Member { memory_deaths: deaths, ..member(Role::Worker) };
        let pod = job(&[]).member(&member).unwrap();
        let resources = pod.spec.unwrap().containers[0].resources.clone().unwrap();
        let amount = |map: Option<std::collections::BTreeMap<_, _>>| -> String {
            let amounts: std::collections::BTreeMap<
                String,
                k8s_openapi::apimachinery::pkg::api::resource::Quantity,
            > = map.unwrap();
            amounts["memory"].0.clone()
        };
        (amount(resources.requests), amount(resources.limits))
    };
    assert_eq!(of(0), ("1Gi".into(), "2Gi".into()));
    assert_eq!(of(2), ("2304Mi".into(), "2304Mi".into()));
}

#[test]
fn the_high_priority_is_for_workers_that_have_it() {
    let high = Member { high: true, ..member(Role::Worker) };
    let class = |m: &Member| job(&[]).member(m).unwrap().spec.unwrap().priority_class_name.unwrap();
    assert_eq!(class(&high), names::PRIORITY_HIGH);
    assert_eq!(class(&member(Role::Worker)), names::PRIORITY_LOW);
}

#[test]
fn what_is_no_pod_names_the_setting() {
    let wrong = job(&[("workers.pod", "{spec: {containers: 3}}")]).member(&member(Role::Worker)).unwrap_err();
    assert_eq!(wrong.kind(), elasticdl_spec::Kind::User);
    assert!(wrong.chain().starts_with("workers.pod or kubernetes of the job is no pod"), "{}", wrong.chain());
}

#[test]
fn the_masters_rights_are_few() {
    let (account, rights, binding) = job(&[]).account();
    insta::assert_snapshot!([yaml(&account), yaml(&rights), yaml(&binding)].join("---\n"));
}

#[test]
fn the_secret_holds_the_job_and_what_proves_who_belongs_to_it() {
    let tls = ["ca", "cert", "key"].map(String::from);
    let secret = job(&[]).secret(&Secrets { token: "t".into(), tls });
    let data = secret.string_data.unwrap();
    let names: Vec<&str> = data.keys().map(String::as_str).collect();
    assert_eq!(names, ["ca.pem", "cert.pem", "job.json", "key.pem", "run", "token"]);
    let spec: JobSpec = serde_json::from_str(&data["job.json"]).unwrap();
    assert_eq!(spec, job(&[]).spec);
}

#[test]
fn masters_and_servers_displace_workers_and_never_the_other_way_round() {
    let values: Vec<i32> = priorities().iter().map(|class| class.value).collect();
    assert!(values.is_sorted_by(|a, b| a > b), "{values:?}");
    assert!(*values.last().unwrap() < 0, "what has no class of its own comes before low workers");
}

/// A job that runs a person's own program.
fn program(flags: &[(&str, &str)]) -> Job {
    let base = [
        ("name", "own"),
        ("command.run", "[python, train.py]"),
        ("command.framework", "tensorflow"),
        ("command.roles", "{ chief: 1, ps: 1, worker: 2 }"),
        ("servers.memory", "8Gi"),
    ];
    let flags = base.iter().chain(flags).map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let spec = resolve(&Inputs { flags, ..Inputs::default() }).unwrap().job;
    let owner = OwnerReference { name: "own-elasticdl".into(), uid: "u".into(), ..OwnerReference::default() };
    Job { spec, namespace: "ads".into(), run: "r1".into(), fresh: false, allowed: None, owner: Some(owner) }
}

#[test]
fn a_member_runs_in_the_persons_image_with_our_program_brought_along() {
    let job = program(&[("command.image", "tensorflow/tensorflow:2.16.1"), ("kubernetes.env", "{ A: b }")]);
    let name = names::part("own", job.spec.command.as_ref().unwrap().member(3));
    insta::assert_snapshot!(yaml(&job.member(&Member { name, ..member(Role::Worker) }).unwrap()));
}

#[test]
fn a_member_without_an_image_of_its_own_runs_in_ours_and_servers_ask_for_what_servers_do() {
    let ps = program(&[]).member(&Member { id: 1, ..member(Role::Worker) }).unwrap();
    let labels = ps.metadata.labels.unwrap();
    assert_eq!((labels[names::ROLE].as_str(), labels[names::MEMBER].as_str()), ("ps", "1"));
    let spec = ps.spec.unwrap();
    assert_eq!(spec.init_containers, None);
    let container = &spec.containers[0];
    assert_eq!((container.command.as_ref(), container.working_dir.as_ref()), (None, None));
    assert_eq!(container.resources.as_ref().unwrap().requests.as_ref().unwrap()["memory"].0, "8Gi");
}

#[test]
fn the_master_of_a_program_needs_no_volume_and_writes_to_its_secret() {
    let job = program(&[("kubernetes.volumes", "[{ hostPath: { path: /srv }, mountPath: /data }]")]);
    let pod = job.master(0).unwrap().spec.unwrap();
    let volumes: Vec<String> = pod.volumes.unwrap().into_iter().map(|volume| volume.name).collect();
    assert_eq!(volumes, ["job", "state"]);
    let (_, rights, _) = job.account();
    let rules = rights.rules.unwrap();
    let secrets = rules.iter().find(|rule| rule.resources.as_ref().unwrap()[0] == "secrets").unwrap();
    assert_eq!(secrets.verbs, ["get", "patch"]);
    assert_eq!(secrets.resource_names.as_ref().unwrap(), &["own-elasticdl"]);
}

#[test]
fn without_a_volume_each_pod_has_a_directory_of_its_own() {
    let mut job = job(&[]);
    job.spec.kubernetes.volumes.clear();
    let spec = job.master(0).unwrap().spec.unwrap();
    let container = &spec.containers[0];
    assert_eq!(container.working_dir.as_deref(), Some("/var/lib/elasticdl"));
    assert!(
        container.args.as_ref().unwrap().iter().any(|arg| arg.starts_with("/var/lib/elasticdl/.elasticdl/"))
    );
    let scratch = spec.volumes.unwrap().into_iter().find(|volume| volume.name == "scratch").unwrap();
    assert!(scratch.empty_dir.is_some());
    let mounts = container.volume_mounts.as_ref().unwrap();
    assert!(
        mounts.iter().any(|m| (m.name.as_str(), m.mount_path.as_str()) == ("scratch", "/var/lib/elasticdl"))
    );
}
