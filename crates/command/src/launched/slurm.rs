//! The environment variables of Slurm's srun.
//!
//! Slurm also sets `SLURM_PROCID=0` and `SLURM_NTASKS` in a batch script, which is one process whatever the number of tasks.
//! `SLURM_STEP_ID` is set only in a step, and the shell of an interactive `salloc` is a step with a special number. The step's own counts
//! take precedence, because `SLURM_NTASKS` may be the number of tasks of the whole job.

use super::{Meeting, Names, Ranks, Vars, host, number, ports};
use crate::error::{Error, Result};

const STEP: &str = "SLURM_STEP_ID";
const JOB: &str = "SLURM_JOB_ID";
const NODE: &str = "SLURM_NODEID";
const RANK: &str = "SLURM_PROCID";
const LOCAL_RANK: &str = "SLURM_LOCALID";
const WORLD: [&str; 2] = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];
const TASKS: [&str; 2] = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
const HOSTS: [&str; 2] = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];

/// All of srun's variables that Nibble reads.
pub fn variables() -> impl Iterator<Item = &'static str> {
    [STEP, JOB, NODE, RANK, LOCAL_RANK].into_iter().chain([WORLD, TASKS, HOSTS].into_iter().flatten())
}

/// Step numbers from this number on are special, such as those of a batch script or an interactive shell (`SLURM_MAX_NORMAL_STEP_ID`).
const SPECIAL_STEPS: u64 = 0xffff_fff0;

/// This task's rank and the number of tasks; `None` if srun did not start this process.
///
/// # Errors
/// Returns an error if variables are missing, invalid or inconsistent.
pub fn ranks(vars: &Vars<'_>) -> Result<Option<Ranks>> {
    let Some(step) = vars.get(STEP) else { return Ok(None) };
    let wrong = || Error::usage(format!("{STEP}: got `{step}`, expected the number of a step"));
    if step.parse::<u64>().map_err(|_| wrong())? >= SPECIAL_STEPS {
        return Ok(None);
    }
    let of = |name| number(name, &vars.required(name, STEP)?);
    let (world_name, world) = first(vars, WORLD)?;
    let world = number(world_name, &world)?;
    // A batch script submitted from a step of one task inherits that step's variables.
    if world == 1 {
        return Ok(Some(Ranks { rank: 0, world, local_rank: 0, local_world: 1 }));
    }
    let (tasks_name, tasks) = first(vars, TASKS)?;
    let node = of(NODE)?;
    let local_world = tasks_on(&tasks, node).ok_or_else(|| {
        let expected =
            format!("expected the number of tasks of every node, including {NODE}={node}, as in 2(x3),1");
        Error::usage(format!("{tasks_name}: got `{tasks}`, {expected}"))
    })?;
    let names = Names { rank: RANK, world: world_name, local_rank: LOCAL_RANK, local_world: tasks_name };
    names.check(Ranks { rank: of(RANK)?, world, local_rank: of(LOCAL_RANK)?, local_world }).map(Some)
}

/// The address at which the tasks connect: the first node, which has task 0, with ports derived from the numbers of the job and the step.
///
/// # Errors
/// Returns an error if variables are missing or invalid.
pub fn meeting(vars: &Vars<'_>) -> Result<Meeting> {
    let (name, list) = first(vars, HOSTS)?;
    let node = first_host(&list).and_then(|node| host(name, &node).ok()).ok_or_else(|| {
        Error::usage(format!("{name}: got `{list}`, expected names of hosts, as in n[01-04,7],gpu-a"))
    })?;
    let (job, step) = (vars.required(JOB, STEP)?, vars.required(STEP, JOB)?);
    Ok(Meeting::First { host: node, ports: ports(&format!("srun {job}.{step}"), None) })
}

/// The first of two variables that is set, with its name.
fn first(vars: &Vars<'_>, names: [&'static str; 2]) -> Result<(&'static str, String)> {
    let found = names.into_iter().find_map(|name| Some((name, vars.get(name)?)));
    found.ok_or_else(|| {
        Error::usage(format!("{} is not set, but {STEP} is; expected both", names.join(" or ")))
    })
}

/// Number of tasks on a node, from a list such as `2(x3),1`: 2 tasks on each of the first three nodes, 1 task on the fourth.
fn tasks_on(list: &str, node: usize) -> Option<usize> {
    let mut before = 0;
    for part in list.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            None => (part, 1),
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse::<u32>().ok()? as usize),
        };
        before += nodes;
        if node < before {
            return tasks.parse::<u32>().ok().map(|tasks| tasks as usize);
        }
    }
    None
}

/// The first host of a list such as `n[001-004,7],gpu-a,m[1-2]-x`.
fn first_host(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list;
    while let Some(at) = rest.find(['[', ',']) {
        name += &rest[..at];
        if rest[at..].starts_with(',') {
            return Some(name);
        }
        let (numbers, after) = rest[at + 1..].split_once(']')?;
        let first = numbers.split([',', '-']).next().filter(|first| !first.is_empty())?;
        if !first.bytes().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        name += first;
        rest = after;
    }
    Some(name + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list_has_the_first_number_of_each_range() {
        let lists = [
            ("n[001-004,7],gpu-a,m[1-2]-x", "n001"),
            ("gpu-a,n[1-2]", "gpu-a"),
            ("m[1-2]-x", "m1-x"),
            ("rack[3,5]node[08-11].example.org,a", "rack3node08.example.org"),
            ("alone", "alone"),
        ];
        for (list, host) in lists {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        for list in ["n[1-2", "n[]", "n[a-b]", "n[,2]"] {
            assert_eq!(first_host(list), None, "{list}");
        }
    }

    #[test]
    fn tasks_of_a_node_are_counted_over_repetitions() {
        let on = |list, nodes: std::ops::Range<usize>| -> Vec<Option<usize>> {
            nodes.map(|node| tasks_on(list, node)).collect()
        };
        assert_eq!(on("2(x3),1", 0..5), [Some(2), Some(2), Some(2), Some(1), None]);
        assert_eq!(on("8,4(x2)", 0..3), [Some(8), Some(4), Some(4)]);
        for list in ["", "two", "2(x", "2(x3", "2(xy)", "-1", "2x3"] {
            assert_eq!(tasks_on(list, 0), None, "{list}");
        }
    }
}
