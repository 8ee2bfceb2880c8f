//! Environments that launchers have set, and invalid environments.

use super::*;

/// The environment variables of a recording.
fn recorded(text: &str) -> Vec<(String, String)> {
    let (first, rest) = text.split_once('\n').unwrap();
    assert!(first.starts_with("# Recorded from "), "{first}");
    let pair = |line: &str| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    rest.lines().map(|line| pair(line).unwrap()).collect()
}

macro_rules! recorded {
    ($name:literal) => {
        recorded(include_str!(concat!("recorded/", $name, ".env")))
    };
}

fn set(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn with(mut vars: Vec<(String, String)>, more: &[(&str, &str)]) -> Vec<(String, String)> {
    vars.retain(|(name, _)| more.iter().all(|(other, _)| name != other));
    vars.extend(set(more));
    vars
}

fn at(vars: &[(String, String)], rendezvous: Option<&str>) -> Result<Option<Launched>> {
    launched(|name| vars.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()), rendezvous)
}

/// Launcher, followed by rank, world, local rank and local world.
type Told = (Launcher, [usize; 4]);

fn told(vars: &[(String, String)], rendezvous: Option<&str>) -> Option<Told> {
    let launched = at(vars, rendezvous).unwrap()?;
    let Launched { launcher, rank, world, local_rank, local_world, .. } = launched;
    Some((launcher, [rank, world, local_rank, local_world]))
}

fn first(vars: &[(String, String)], rendezvous: Option<&str>) -> (String, Vec<u16>) {
    match at(vars, rendezvous).unwrap().unwrap().meeting {
        Meeting::First { host, ports } => (host, ports),
        Meeting::At(at) => panic!("at {at}"),
    }
}

fn error(vars: &[(String, String)], rendezvous: Option<&str>) -> String {
    match at(vars, rendezvous) {
        Err(Error::Usage(message)) => message,
        other => panic!("{other:?}"),
    }
}

const ADDRESS: Option<&str> = Some("10.0.0.1:29500");

/// The variables that `nibble launch --ranks 4` sets for rank 3.
const BY_NIBBLE: [(&str, &str); 5] = [
    (env::RANK, "3"),
    (env::WORLD_SIZE, "4"),
    (env::LOCAL_RANK, "3"),
    (env::LOCAL_WORLD_SIZE, "4"),
    (env::RENDEZVOUS, "127.0.0.1:41000"),
];

const BY_HAND: [(&str, &str); 4] =
    [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];

#[test]
fn launchers_tell_the_rank() {
    use Launcher::{Mpi, Slurm, Torchrun};
    let of = [
        (recorded!("torchrun-rank1"), Torchrun, [1, 2, 1, 2]),
        (recorded!("torchrun-c10d-rank0"), Torchrun, [0, 4, 0, 2]),
        (recorded!("torchrun-c10d-rank3"), Torchrun, [3, 4, 1, 2]),
        (recorded!("openmpi-rank1"), Mpi, [1, 2, 1, 2]),
        (recorded!("mpich-rank1"), Mpi, [1, 2, 1, 2]),
        (recorded!("slurm-rank4"), Slurm, [4, 5, 0, 1]),
        (recorded!("slurm-smaller-rank2"), Slurm, [2, 3, 0, 1]),
        (recorded!("slurm-cyclic-rank3"), Slurm, [3, 5, 1, 2]),
        (recorded!("slurm-pmi2-rank4"), Slurm, [4, 5, 0, 1]),
        // srun started helper processes of these launchers, which have ranks of their own.
        (recorded!("slurm-openmpi-rank1"), Mpi, [1, 2, 1, 2]),
        (recorded!("slurm-mpich-rank1"), Mpi, [1, 5, 1, 2]),
    ];
    for (vars, launcher, ranks) in of {
        assert_eq!(told(&vars, ADDRESS), Some((launcher, ranks)), "{vars:?}");
    }
}

#[test]
fn what_a_job_runs_without_srun_is_alone() {
    let of = [
        recorded!("slurm-batch"),
        recorded!("slurm-salloc"),
        recorded!("slurm-interactive"),
        recorded!("slurm-batch-of-step"),
    ];
    for vars in of {
        assert!(
            vars.contains(&("SLURM_NTASKS".into(), "5".into()))
                || vars.contains(&("SLURM_NTASKS".into(), "3".into()))
        );
        assert_eq!(told(&vars, None), None, "{vars:?}");
    }
    assert_eq!(told(&[], None), None);
}

#[test]
fn nibble_launch_has_the_hub_and_comes_first() {
    for outer in [vec![], recorded!("torchrun-rank1"), recorded!("openmpi-rank1"), recorded!("slurm-rank4")] {
        let launched = at(&with(outer, &BY_NIBBLE), ADDRESS).unwrap().unwrap();
        let meeting = Meeting::At("127.0.0.1:41000".into());
        let expected = Launched {
            launcher: Launcher::Nibble,
            rank: 3,
            world: 4,
            local_rank: 3,
            local_world: 4,
            meeting,
        };
        assert_eq!(launched, expected);
    }
}

#[test]
fn all_ranks_of_torchrun_try_the_same_ports_and_not_its_own() {
    let (zero, three) = (recorded!("torchrun-c10d-rank0"), recorded!("torchrun-c10d-rank3"));
    let (host, ports) = first(&zero, None);
    assert_eq!((host.as_str(), ports.len()), ("localhost", 16));
    assert_eq!(first(&three, None), (host, ports.clone()));
    let again = first(&with(zero.clone(), &[("TORCHELASTIC_RESTART_COUNT", "1")]), None).1;
    let other = first(&with(zero, &[("TORCHELASTIC_RUN_ID", "another")]), None).1;
    assert!(again != ports && other != ports && again != other);
    for ports in [ports, again, other] {
        let distinct: std::collections::BTreeSet<u16> = ports.iter().copied().collect();
        assert_eq!(distinct.len(), 16);
        assert!(ports.iter().all(|port| (20_000..32_000).contains(port)), "{ports:?}");
    }
    // The launcher's port is skipped, even if it is the first.
    let all = super::ports("a run", None);
    let without = super::ports("a run", Some(all[0]));
    assert_eq!((&without[..15], without.len()), (&all[1..], 16));
}

#[test]
fn srun_has_the_hub_on_the_first_host_of_the_step() {
    let (host, ports) = first(&recorded!("slurm-rank4"), None);
    assert_eq!((host.as_str(), ports.len()), ("n01", 16));
    // This recording is from another step of the same job.
    let (host, other) = first(&recorded!("slurm-smaller-rank2"), None);
    assert!(host == "n01" && other != ports);
    let elsewhere = with(recorded!("slurm-smaller-rank2"), &[("SLURM_STEP_NODELIST", "n[02-03]")]);
    assert_eq!(first(&elsewhere, None), ("n02".into(), other));
}

#[test]
fn a_given_address_comes_before_the_launchers() {
    for vars in
        [recorded!("torchrun-rank1"), recorded!("slurm-rank4"), recorded!("mpich-rank1"), set(&BY_HAND)]
    {
        let vars = with(vars, &[("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")]);
        assert_eq!(first(&vars, ADDRESS), ("10.0.0.1".into(), vec![29500]));
        let vars = with(vars, &[(env::RENDEZVOUS, "[fe80::1]:7000")]);
        assert_eq!(first(&vars, None), ("fe80::1".into(), vec![7000]));
        assert_eq!(first(&vars, ADDRESS), ("10.0.0.1".into(), vec![29500]));
    }
    // Without a launcher, the variable is ignored, and the option is an error.
    assert_eq!(told(&set(&[(env::RENDEZVOUS, "a:1")]), None), None);
    assert!(error(&recorded!("slurm-batch"), ADDRESS).starts_with("--rendezvous: no launcher"));
}

#[test]
fn mpirun_needs_an_address() {
    let one_host = error(&recorded!("openmpi-rank1"), None);
    assert!(one_host.contains("--rendezvous 127.0.0.1:29500"), "{one_host}");
    let hosts = error(&recorded!("slurm-mpich-rank1"), None);
    assert!(hosts.contains("--rendezvous HOST:29500") && hosts.contains("NIBBLE_RENDEZVOUS"), "{hosts}");
}

#[test]
fn the_variables_of_torchrun_may_be_set_by_hand() {
    let by_hand = set(&BY_HAND);
    assert_eq!(told(&by_hand, None), Some((Launcher::Torchrun, [1, 2, 1, 2])));
    assert_eq!(first(&by_hand, None), ("localhost".into(), vec![29500]), "nobody else has that port");
    // On several hosts, it is unknown which processes share a host.
    let hosts = with(by_hand.clone(), &[("MASTER_ADDR", "node1")]);
    assert_eq!(error(&hosts, None), "LOCAL_RANK is not set, but RANK is; expected both");
    let hosts = with(hosts, &[("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")]);
    assert_eq!(told(&hosts, None), Some((Launcher::Torchrun, [1, 2, 0, 1])));
    // A task of srun may start processes in this way.
    assert_eq!(told(&with(recorded!("slurm-rank4"), &BY_HAND), None).unwrap().0, Launcher::Torchrun);
    // A batch script often exports these variables for its tasks, whatever the tasks are.
    let exported = [("MASTER_ADDR", "n01"), ("MASTER_PORT", "29500"), ("WORLD_SIZE", "5")];
    assert_eq!(told(&with(recorded!("slurm-rank4"), &exported), None).unwrap().0, Launcher::Slurm);
    assert_eq!(
        error(&with(recorded!("slurm-batch"), &exported), None),
        "RANK is not set, but WORLD_SIZE is; expected both"
    );
    let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")];
    assert_eq!(told(&set(&alone), None), None);
    assert_eq!(told(&with(recorded!("slurm-rank4"), &alone), None).unwrap().0, Launcher::Slurm);
    assert_eq!(told(&set(&[("RANK", "captain")]), None), None, "a name that may mean anything");
}

#[test]
fn a_world_of_one_is_not_launched() {
    let one = |rank, world, local_rank, local_world| {
        set(&[(rank, "0"), (world, "1"), (local_rank, "0"), (local_world, "1")])
    };
    for names in [NIBBLE, TORCHRUN, OPEN_MPI, HYDRA] {
        assert_eq!(told(&one(names.rank, names.world, names.local_rank, names.local_world), None), None);
    }
    let task = with(recorded!("slurm-rank4"), &[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")]);
    assert_eq!(told(&task, None), None);
}

#[test]
fn numbers_that_do_not_fit_are_named() {
    let of = [
        (
            recorded!("openmpi-rank1"),
            "OMPI_COMM_WORLD_RANK",
            "2",
            "expected a number below OMPI_COMM_WORLD_SIZE, which is 2",
        ),
        (
            recorded!("openmpi-rank1"),
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            "3",
            "expected at most OMPI_COMM_WORLD_SIZE, which is 2",
        ),
        (
            recorded!("mpich-rank1"),
            "MPI_LOCALRANKID",
            "2",
            "expected a number below MPI_LOCALNRANKS, which is 2",
        ),
        (recorded!("mpich-rank1"), "PMI_SIZE", "two", "expected a number from 0 to 1048576"),
        (recorded!("torchrun-rank1"), "RANK", "-1", "expected a number from 0 to 1048576"),
        (
            recorded!("torchrun-rank1"),
            "WORLD_SIZE",
            "99999999999999999999",
            "expected a number from 0 to 1048576",
        ),
        (recorded!("torchrun-rank1"), "MASTER_PORT", "0", "expected a port from 1 to 65535"),
        (recorded!("torchrun-rank1"), "MASTER_ADDR", "a b", "expected the name or address of a host"),
        (
            recorded!("slurm-rank4"),
            "SLURM_PROCID",
            "5",
            "expected a number below SLURM_STEP_NUM_TASKS, which is 5",
        ),
        (recorded!("slurm-rank4"), "SLURM_STEP_ID", "x", "expected the number of a step"),
        (
            recorded!("slurm-rank4"),
            "SLURM_STEP_TASKS_PER_NODE",
            "2(x2)",
            "expected the number of tasks of every node, including SLURM_NODEID=2, as in 2(x3),1",
        ),
        (
            recorded!("slurm-rank4"),
            "SLURM_STEP_NODELIST",
            "n[01",
            "expected names of hosts, as in n[01-04,7],gpu-a",
        ),
        (set(&BY_NIBBLE), env::RENDEZVOUS, "41000", "expected HOST:PORT, as in 10.0.0.1:29500"),
    ];
    for (vars, name, value, expected) in of {
        assert_eq!(error(&with(vars, &[(name, value)]), None), format!("{name}: got `{value}`, {expected}"));
    }
    for address in ["", "host", "host:", ":1", "host:0", "host:65536", "http://host:1", "::1:80", "[::1:80"] {
        let expected = format!("--rendezvous: got `{address}`, expected HOST:PORT, as in 10.0.0.1:29500");
        assert_eq!(error(&recorded!("openmpi-rank1"), Some(address)), expected);
    }
}

#[test]
fn a_variable_that_is_missing_beside_others_is_named() {
    let of = [
        (recorded!("torchrun-rank1"), "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
        (recorded!("torchrun-rank1"), "MASTER_PORT", "RANK"),
        (recorded!("openmpi-rank1"), "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK"),
        (recorded!("mpich-rank1"), "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
        (recorded!("slurm-rank4"), "SLURM_PROCID", "SLURM_STEP_ID"),
        (recorded!("slurm-rank4"), "SLURM_NODEID", "SLURM_STEP_ID"),
        (set(&BY_NIBBLE), env::WORLD_SIZE, env::RANK),
        (set(&BY_NIBBLE), env::RANK, env::WORLD_SIZE),
        (set(&BY_NIBBLE), env::RENDEZVOUS, env::RANK),
    ];
    for (vars, name, present) in of {
        let expected = format!("{name} is not set, but {present} is; expected both");
        // An empty variable counts as not set.
        assert_eq!(error(&with(vars, &[(name, "")]), None), expected);
    }
    // These process managers set no number of ranks per host.
    assert_eq!(told(&set(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]), None), None);
    let managed = set(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]);
    assert_eq!(error(&managed, None), "MPI_LOCALRANKID is not set, but PMI_RANK is; expected both");
}
