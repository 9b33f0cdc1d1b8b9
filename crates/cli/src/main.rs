//! `elasticdl`: the one binary. Every role is a subcommand; the person's commands start and follow them.
//!
//! - [`args`]: the command line. [`settings`]: from there to a job.
//! - [`train`], [`check`], [`submit`], [`follow`], [`revive`]: a job from its file to its end; [`view`] shows it.
//! - [`jobs`], [`logs`]: jobs that are there already. [`home`], [`lock`]: where they live, and whose they are.
//! - [`audit`], [`chaos`]: whether every record counts once, and harm done to see that it does.
//! - [`roles`], [`local`], [`process`]: master, ps and worker on this machine.
//! - [`gang`], [`member`]: a person's own program in place of a model of ours.
//! - [`tether`], [`in_pod`], [`pods`]: a job on a cluster, from here and from inside it. [`operator`]: many of them.
//! - [`export`], [`store`], [`model`], [`infer`], [`predict`], [`evaluate`]: trained models.
//! - [`image`], [`zoo`]: container images of this program, with files of one's own, and registries.
//! - [`data`], [`truth`]: synthetic data, and what it allows at best.
//!
//! `anyhow` ends here: below, every crate has its own error, whose kind decides the exit code ([`fault`]).

use std::io::Write;
use std::panic;
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command, Config, Data, Part, Zoo};
use crate::fault::Exit;

mod args;
mod audit;
mod chaos;
mod check;
mod client;
mod data;
mod evaluate;
mod export;
mod fault;
mod follow;
mod gang;
mod home;
mod image;
mod in_pod;
mod infer;
mod jobs;
mod local;
mod lock;
mod logs;
mod member;
mod model;
mod operator;
mod pods;
mod predict;
mod print;
mod process;
mod revive;
mod roles;
mod settings;
mod store;
mod submit;
mod tether;
mod train;
mod truth;
mod view;
mod zoo;

/// Training allocates and frees large buffers all the time; this keeps their pages.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let exit = if e.use_stderr() { Exit::User } else { Exit::Done };
            let _ = e.print();
            return ExitCode::from(exit as u8);
        }
    };
    log(&cli.command);
    explain_panics();
    let exit = match panic::catch_unwind(|| run(cli.command)) {
        Ok(Ok(exit)) => exit,
        Ok(Err(error)) => {
            print::note(&fault::text(&error));
            fault::exit(&error)
        }
        Err(_) => Exit::Bug,
    };
    ExitCode::from(exit as u8)
}

fn run(command: Command) -> anyhow::Result<Exit> {
    match command {
        Command::Train(args) => wait(train::train(args)),
        Command::Resume(args) => wait(train::resume(args)),
        Command::Jobs(args) => jobs::jobs(&args),
        Command::Status(args) => jobs::status(&args),
        Command::Top(args) => wait(jobs::top(&args)),
        Command::Logs(args) => logs::logs(&args),
        Command::Scale(args) => jobs::scale(&args),
        Command::Stop(args) => jobs::stop(&args),
        Command::Audit(args) => audit::command::command(&args),
        Command::Chaos(args) => wait(chaos::command::command(args)),
        Command::Export(args) => export::command(&args),
        Command::Evaluate(args) => evaluate::evaluate(&args),
        Command::Predict(args) => predict::predict(&args),
        Command::Data(Data::Synth(args)) => data::synth(&args),
        Command::Data(Data::Head(args)) => data::head(&args),
        Command::Config(Config::Show(args)) => settings::show(&args),
        Command::Image(args) => image::command::command(&args),
        Command::Zoo(Zoo::Init(args)) => zoo::init::init(&args),
        Command::Zoo(Zoo::Build(args)) => zoo::build(&args),
        Command::Zoo(Zoo::Push(args)) => zoo::push::push(&args),
        Command::Operator(args) => operator::command(args),
        Command::Master(args) if args.on == args::Place::Kubernetes => wait(in_pod::master(args)),
        Command::Master(args) => wait(roles::master(args)),
        Command::Tether(args) => wait(tether::tether(args)),
        Command::Ps(args) => wait(roles::ps(args)),
        Command::Worker(args) => roles::worker(args),
        Command::Member(Part::Run(args)) => wait(member::run(args)),
        Command::Member(Part::Exec(args)) => member::exec(args.parent, &args.program),
        Command::Member(Part::Install(args)) => member::install(&args.dir),
    }
}

/// Runs a future to its end, and then waits for nothing that is still under way.
fn wait(future: impl Future<Output = anyhow::Result<Exit>>) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(future);
    runtime.shutdown_background();
    outcome
}

/// Roles log what changes into their files; for people's commands only warnings are worth a line.
fn log(command: &Command) {
    let role = match command {
        Command::Operator(args) => args.files.is_none(),
        Command::Master(_)
        | Command::Tether(_)
        | Command::Ps(_)
        | Command::Worker(_)
        | Command::Member(_) => true,
        _ => false,
    };
    // Their errors come back to us as errors, and are told where they matter.
    let quiet = "kube_client=off,object_store=off";
    let default = format!("{},{quiet}", if role { "info" } else { "warn" });
    let filter = EnvFilter::try_from_env("ELASTICDL_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    builder.with_ansi(false).with_target(role).init();
}

/// A panic is a bug of ours; say so, and what to do with it.
fn explain_panics() {
    let default = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        default(info);
        let mut err = std::io::stderr().lock();
        let _ = writeln!(err, "error: this is a bug in elasticdl {}", env!("CARGO_PKG_VERSION"));
        let _ = writeln!(
            err,
            "hint: please report it with the lines above: {}/issues",
            env!("CARGO_PKG_REPOSITORY")
        );
    }));
}
