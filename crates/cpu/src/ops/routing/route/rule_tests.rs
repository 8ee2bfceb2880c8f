//! Tests of sigmoid scores, selection biases, expert groups and scaled gate weights. The tests compare with the formulas in double
//! precision and with results of the `transformers` library.

use super::*;
use crate::Buf;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere};
use nibble_core::Backend;
use nibble_core::ops::{ExpertGroups, GroupScore};

/// All combinations of scores, normalization, groups and bias; rules with groups also scale the gate weights.
fn rules(top_k: usize) -> Vec<(RouteRule, bool)> {
    let group = |count, top, score| Some(ExpertGroups { count, top, score });
    let groups =
        [None, group(4, 2, GroupScore::Max), group(2, 1, GroupScore::Top2), group(4, 3, GroupScore::Top2)];
    let mut all = Vec::new();
    for scores in [Scores::Softmax, Scores::Sigmoid] {
        for normalize in [false, true] {
            for groups in groups {
                let scale = if groups.is_some() { 2.5 } else { 1.0 };
                let rule = RouteRule { scores, top_k, normalize, groups, scale, in_turn: false };
                all.extend([(rule, false), (rule, true)]);
            }
        }
    }
    all
}

struct Scene {
    cpu: Cpu,
    logits: Tensor<Cpu>,
    bias: Buf<f32>,
    rows: Vec<Vec<f64>>,
}

impl Scene {
    fn new(cpu: Cpu, tokens: usize, experts: usize) -> Self {
        let x: Vec<f32> = normals(31, tokens * experts).iter().map(|x| 2.0 * x).collect();
        let logits = Tensor::from_f32(&cpu, &x, tokens, experts).unwrap();
        let bias = cpu.upload(&normals(32, experts).iter().map(|x| 0.3 * x).collect::<Vec<_>>()).unwrap();
        let rows = x.chunks(experts).map(|row| row.iter().map(|&x| f64::from(x)).collect()).collect();
        Self { cpu, logits, bias, rows }
    }

    fn route(&self, rule: RouteRule, has_bias: bool, shards: usize) -> Routing<Cpu> {
        let bias = has_bias.then_some(&self.bias);
        Route { logits: &self.logits, bias, rule, shards, documents: None }.run(&self.cpu).unwrap()
    }
}

/// Scores of a row, and their fractions of the row's sum, which the load-balancing loss uses.
fn scores_f64(rule: &RouteRule, row: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let scores: Vec<f64> = match rule.scores {
        Scores::Softmax => {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            row.iter().map(|x| x.exp() / sum).collect()
        }
        Scores::Sigmoid => row.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
    };
    let sum: f64 = scores.iter().sum();
    let shares = scores.iter().map(|s| s / sum).collect();
    (scores, shares)
}

/// The experts of a row, selected by sorting, and the margin of the selection.
fn choose_f64(rule: &RouteRule, scores: &[f64], bias: Option<&[f32]>) -> (Vec<usize>, f64) {
    let choice: Vec<f64> =
        scores.iter().enumerate().map(|(e, s)| s + bias.map_or(0.0, |bias| f64::from(bias[e]))).collect();
    let sorted = |scores: &[f64], among: Vec<usize>| {
        let mut order = among;
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        order
    };
    let gap = |scores: &[f64], order: &[usize], first: usize, last: usize| {
        (first..last.min(order.len() - 1))
            .map(|i| scores[order[i]] - scores[order[i + 1]])
            .fold(f64::MAX, f64::min)
    };
    let (mut among, mut margin) = ((0..scores.len()).collect::<Vec<_>>(), f64::MAX);
    if let Some(ExpertGroups { count, top, score }) = rule.groups {
        let each = scores.len() / count;
        let of_group = |of: &[f64]| {
            let order = sorted(of, (0..each).collect());
            of[order[0]] + if score == GroupScore::Top2 { of[order[1]] } else { 0.0 }
        };
        let of_groups: Vec<f64> = choice.chunks(each).map(of_group).collect();
        let order = sorted(&of_groups, (0..count).collect());
        margin = gap(&of_groups, &order, top - 1, top);
        among.retain(|e| order[..top].contains(&(e / each)));
    }
    let order = sorted(&choice, among);
    let margin = margin.min(gap(&choice, &order, 0, rule.top_k));
    (order[..rule.top_k].to_vec(), margin)
}

fn weights_f64(rule: &RouteRule, scores: &[f64], chosen: &[i32]) -> Vec<f64> {
    let chosen: Vec<f64> = chosen.iter().map(|&e| scores[e as usize]).collect();
    let divisor = if rule.normalize { chosen.iter().sum() } else { 1.0 };
    chosen.iter().map(|s| f64::from(rule.scale) * s / divisor).collect()
}

/// The losses of a shard for given loads.
fn losses_f64(rule: &RouteRule, rows: &[Vec<f64>], load: &[i32]) -> [f64; 2] {
    let (tokens, experts) = (rows.len() as f64, load.len());
    let (mut balance, mut z) = (0.0, 0.0);
    for row in rows {
        let shares = scores_f64(rule, row).1;
        let per_slot = tokens * tokens * rule.top_k as f64;
        balance +=
            shares.iter().zip(load).map(|(s, n)| experts as f64 * f64::from(*n) * s / per_slot).sum::<f64>();
        z += row.iter().map(|x| x.exp()).sum::<f64>().ln().powi(2) / tokens;
    }
    [balance, z]
}

fn near(got: f32, want: f64) -> bool {
    (f64::from(got) - want).abs() <= 2e-6 * want.abs().max(1e-30)
}

#[test]
fn every_rule_is_its_formulas() {
    let (tokens, experts, shards) = (150, 16, 2);
    let scene = Scene::new(Cpu::new(2).unwrap(), tokens, experts);
    for (rule, has_bias) in rules(5) {
        let bias = has_bias.then(|| scene.bias.as_slice());
        let r = scene.route(rule, has_bias, shards);
        let (mut load, mut decided) = (vec![0; shards * experts], 0);
        for (t, row) in scene.rows.iter().enumerate() {
            let scores = scores_f64(&rule, row).0;
            let chosen = &r.expert.as_slice()[t * 5..][..5];
            let (want, margin) = choose_f64(&rule, &scores, bias);
            if margin > 1e-5 {
                decided += 1;
                assert!(
                    chosen.iter().zip(&want).all(|(a, b)| *a as usize == *b),
                    "{rule:?}: {chosen:?}, {want:?}"
                );
            }
            for (got, want) in r.weight.as_slice()[t * 5..].iter().zip(weights_f64(&rule, &scores, chosen)) {
                assert!(near(*got, want), "{rule:?}: {got}, {want}");
            }
            chosen.iter().for_each(|&e| load[t / (tokens / shards) * experts + e as usize] += 1);
        }
        assert!(decided > tokens / 2, "{rule:?}: {decided}");
        assert_eq!(r.load.as_slice(), load);
        let each = tokens / shards;
        for (shard, got) in r.losses.as_slice().chunks(2).enumerate() {
            let want =
                losses_f64(&rule, &scene.rows[shard * each..][..each], &load[shard * experts..][..experts]);
            assert!(near(got[0], want[0]) && near(got[1], want[1]), "{rule:?}: {got:?}, {want:?}");
        }
    }
}

#[test]
fn every_rule_has_the_gradient_of_finite_differences() {
    let (tokens, experts, shards) = (6, 8, 2);
    let scene = Scene::new(Cpu::new(2).unwrap(), tokens, experts);
    let dweight = scene.cpu.upload(&normals(33, tokens * 3)).unwrap();
    let batch_load = scene.cpu.upload(&[9.0, 1.0, 4.0, 0.0, 7.0, 7.0, 5.0, 3.0]).unwrap();
    for (rule, has_bias) in rules(3) {
        for (aux_scale, z_scale, one_loss) in
            [(0.0, 0.0, false), (1.5, 0.0, false), (0.0, 0.25, false), (0.5, 0.1, true)]
        {
            let routing = scene.route(rule, has_bias, shards);
            let op = RouteBackward {
                routing: &routing,
                rule,
                shards,
                dweight: &dweight,
                aux_scale,
                documents: None,
                batch_load: one_loss.then_some(&batch_load),
                batch_rows: 12,
                z_scale,
            };
            let got = op.run(&scene.cpu).unwrap().to_f32_vec(&scene.cpu).unwrap();
            let objective = |rows: &[Vec<f64>]| {
                let mut total = 0.0;
                for (t, row) in rows.iter().enumerate() {
                    let (scores, shares) = scores_f64(&rule, row);
                    let weights = weights_f64(&rule, &scores, &routing.expert.as_slice()[t * 3..][..3]);
                    let dweight = &dweight.as_slice()[t * 3..][..3];
                    total += weights.iter().zip(dweight).map(|(w, d)| w * f64::from(*d)).sum::<f64>();
                    if one_loss {
                        // The expected loss is experts · Σ (load / rows) · (sum of shares / rows).
                        let dot: f64 = shares.iter().zip(batch_load.as_slice()).map(|(s, n)| s * n).sum();
                        total += f64::from(aux_scale) * experts as f64 * dot / 144.0;
                    }
                }
                for (rows, load) in rows.chunks(tokens / shards).zip(routing.load.as_slice().chunks(experts))
                {
                    let [balance, z] = losses_f64(&rule, rows, load);
                    let balance = if one_loss { 0.0 } else { balance };
                    total += f64::from(aux_scale) * balance + f64::from(z_scale) * z;
                }
                total
            };
            let (mut largest, mut worst) = (0.0f64, 0.0f64);
            for (i, &got) in got.iter().enumerate() {
                let at = |h: f64| {
                    let mut rows = scene.rows.clone();
                    rows[i / experts][i % experts] += h;
                    objective(&rows)
                };
                let want = (at(1e-5) - at(-1e-5)) / 2e-5;
                worst = worst.max((f64::from(got) - want).abs());
                largest = largest.max(want.abs());
            }
            assert!(largest > 1e-3 && worst <= 2e-6 * largest, "{rule:?}: {worst} of {largest}");
        }
    }
}

#[test]
fn every_rule_has_the_same_bits_everywhere() {
    for (rule, has_bias) in rules(5) {
        same_everywhere(|cpu| {
            let scene = Scene::new(cpu.clone(), 70, 48);
            let r = scene.route(rule, has_bias, 1);
            let dweight = &cpu.upload(&normals(34, 70 * 5)).unwrap();
            let back = RouteBackward {
                routing: &r,
                rule,
                shards: 1,
                dweight,
                aux_scale: 0.1,
                documents: None,
                batch_load: None,
                batch_rows: 0,
                z_scale: 0.01,
            };
            let of = |x: &Buf<f32>| x.as_slice().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let back = bits(&back.run(cpu).unwrap());
            (r.expert.as_slice().to_vec(), [of(&r.weight), of(&r.losses), of(&r.log_sum_exp), back])
        });
    }
}

#[test]
fn equal_scores_choose_the_lower_group_and_the_lower_expert() {
    let cpu = Cpu::new(1).unwrap();
    let groups = Some(ExpertGroups { count: 4, top: 2, score: GroupScore::Top2 });
    let rule =
        RouteRule { scores: Scores::Sigmoid, top_k: 3, normalize: true, groups, scale: 1.0, in_turn: false };
    let of = |logits: [f32; 8], bias: [f32; 8]| {
        let logits = &Tensor::from_f32(&cpu, &logits, 1, 8).unwrap();
        let bias = cpu.upload(&bias).unwrap();
        let r = Route { logits, bias: Some(&bias), rule, shards: 1, documents: None }.run(&cpu).unwrap();
        (r.expert.as_slice().to_vec(), r.weight.as_slice().to_vec())
    };
    let third = 1.0f32 / 3.0;
    assert_eq!(of([0.0; 8], [0.0; 8]), (vec![0, 1, 2], vec![third; 3]));
    // The last two groups have the largest biases; biases do not change the gate weights.
    let bias = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.5];
    assert_eq!(of([0.0; 8], bias), (vec![4, 6, 7], vec![third; 3]));
    // A NaN is selected only after all numbers.
    let bias = [f32::NAN, 0.0, f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NAN, f32::NAN, -1.0, -1.0];
    assert_eq!(of([0.0; 8], bias).0, [6, 7, 2]);
    // If all sigmoids are 0 the weights are 0, not 0 / 0.
    assert_eq!(of([-200.0; 8], [0.0; 8]), (vec![0, 1, 2], vec![0.0; 3]));
    let mut logits = [0.0; 8];
    logits[5] = f32::INFINITY;
    let (expert, weight) = of(logits, [0.0; 8]);
    assert_eq!(expert, [0, 1, 2]);
    assert!(weight.iter().all(|w| w.is_nan()));
}

/// With `in_turn`, the slots of neighbouring tokens cover all experts evenly, and the gate weights are the scores of the assigned experts.
#[test]
fn experts_that_take_turns_have_as_many_slots_each_and_the_weights_of_their_scores() {
    let (tokens, experts, top_k, shards) = (3 * 24, 12, 3, 3);
    let scene = Scene::new(Cpu::new(2).unwrap(), tokens, experts);
    for scores in [Scores::Softmax, Scores::Sigmoid] {
        let rule = RouteRule { scores, in_turn: true, ..RouteRule::softmax(top_k, true) };
        let bias = scene.cpu.upload(&vec![9.0; experts]).unwrap();
        let op = Route { logits: &scene.logits, bias: Some(&bias), rule, shards, documents: None };
        let routing = op.run(&scene.cpu).unwrap();
        assert!(
            routing.load.as_slice().iter().all(|&slots| slots == 24 * 3 / 12),
            "{:?}",
            routing.load.as_slice()
        );
        for (token, row) in scene.rows.iter().enumerate() {
            let chosen = &routing.expert.as_slice()[token * top_k..][..top_k];
            let t = token as i32 % 24;
            assert_eq!(chosen, [t % 12, (t + 4) % 12, (t + 8) % 12]);
            let (of_choice, _) = scores_f64(&rule, row);
            let expected = weights_f64(&rule, &of_choice, chosen);
            let weight = &routing.weight.as_slice()[token * top_k..][..top_k];
            assert!(weight.iter().zip(expected).all(|(w, x)| (f64::from(*w) - x).abs() < 1e-6), "{weight:?}");
        }
    }
    let rule = RouteRule { in_turn: true, ..RouteRule::softmax(5, true) };
    let seen: Vec<_> = (0..5).map(|slot| rule.turn(11, slot, 12)).collect();
    assert_eq!(seen, [11, 1, 3, 5, 7], "no expert twice where the slots do not divide them");
}

#[test]
fn rules_that_no_router_can_follow_are_refused() {
    let scene = Scene::new(Cpu::new(1).unwrap(), 2, 8);
    let refused = |top_k, count, top, score| {
        let groups = Some(ExpertGroups { count, top, score });
        let rule = RouteRule { groups, ..RouteRule::softmax(top_k, true) };
        let op = Route { logits: &scene.logits, bias: None, rule, shards: 1, documents: None };
        op.run(&scene.cpu).unwrap_err().to_string()
    };
    let cases = [
        (refused(2, 3, 1, GroupScore::Max), "`groups.count` is 3"),
        (refused(2, 0, 1, GroupScore::Max), "`groups.count` is 0"),
        (refused(2, 4, 0, GroupScore::Max), "`groups.top` is 0"),
        (refused(2, 4, 5, GroupScore::Max), "`groups.top` is 5"),
        (refused(5, 4, 2, GroupScore::Max), "`top_k` is 5"),
        (refused(2, 8, 4, GroupScore::Top2), "`groups.score` is"),
    ];
    for (got, want) in cases {
        assert!(got.contains(want), "{got}");
    }
    let bias = scene.cpu.zeros(7).unwrap();
    let op = Route {
        logits: &scene.logits,
        bias: Some(&bias),
        rule: RouteRule::softmax(2, true),
        shards: 1,
        documents: None,
    };
    assert_eq!(op.run(&scene.cpu).unwrap_err().to_string(), "route: `bias.len()` is 7, expected 8");
}

/// Results of `transformers` 5.24 in F32 for these logits: the selected experts sorted by score, and gradients by autograd.
struct Vectors {
    rule: RouteRule,
    logits: [f32; 24],
    bias: Option<[f32; 8]>,
    dweight: [f32; 9],
    expert: [i32; 9],
    weight: [f32; 9],
    dlogits: [f32; 24],
}

#[rustfmt::skip]
fn vectors() -> [Vectors; 3] {
    let (top_k, group) = (3, |score| Some(ExpertGroups { count: 4, top: 2, score }));
    let softmax = RouteRule::softmax(top_k, false);
    [
        // `DeepseekV2TopkRouter` with `group_limited_greedy`.
        Vectors {
            rule: RouteRule { groups: group(GroupScore::Max), scale: 16.0, ..softmax },
            logits: [
                -3.165, -0.649, 3.853, -0.66, 0.397, 1.564, 2.078, -1.449, -0.271, 1.494, 1.224, 3.736,
                5.023, -2.51, 1.633, -2.131, -3.274, 0.315, 0.791, -2.735, -0.201, 0.474, 1.265, -0.183,
            ],
            bias: None,
            dweight: [1.615, 1.93, -0.423, -0.083, -0.984, -1.249, -0.188, 0.283, 0.131],
            expert: [2, 6, 3, 4, 3, 2, 6, 2, 7],
            weight: [12.027032, 2.0383832, 0.1318826, 11.696997, 3.2295165, 0.2619327, 5.409927, 3.367719, 1.2715487],
            dlogits: [
                -0.015687445, -0.1941945, 1.9078254, -0.24785644, -0.552725, -1.7755407, 0.96543545, -0.08725722,
                0.016431416, 0.095985286, -0.25388074, -2.2744176, 2.3012738, 0.0017510134, 0.110299, 0.0025579215,
                -0.0003705388, -0.013412713, 0.93147504, -0.00063521165, -0.008006094, -0.015724232, -1.0517476, 0.15842137,
            ],
        },
        // `DeepseekV2TopkRouter` with `greedy`.
        Vectors {
            rule: softmax,
            logits: [
                -0.735, -1.764, 1.092, 0.297, -4.516, 0.809, 1.144, 0.616, 0.255, -0.038, -0.815, 1.063,
                -1.484, -1.275, -3.157, 1.292, 1.014, -0.315, 0.921, -2.306, -1.379, -0.099, -2.448, 1.281,
            ],
            bias: None,
            dweight: [0.33, 1.039, -1.26, 0.416, -1.303, 0.435, -1.15, -0.815, -0.912],
            expert: [6, 2, 5, 7, 3, 0, 7, 0, 2],
            weight: [0.256808, 0.24379525, 0.18370454, 0.37220833, 0.2960279, 0.13195404, 0.3290253, 0.25192583, 0.22955315],
            dlogits: [
                -0.0041807457, -0.0014940486, 0.22731905, -0.011733988, -9.532052e-05, -0.25104734, 0.057375494, -0.01614305,
                0.08029215, 0.017078038, 0.007852197, -0.33436775, 0.0040220567, 0.004956964, 0.00075487216, 0.21941146,
                -0.0055294884, 0.05289279, -0.027305089, 0.007222976, 0.018251864, 0.06564537, 0.0062668067, -0.1174452,
            ],
        },
        // `DeepseekV3TopkRouter`.
        Vectors {
            rule: RouteRule { scores: Scores::Sigmoid, normalize: true, groups: group(GroupScore::Top2), scale: 2.5, ..softmax },
            logits: [
                -0.448, -1.591, -4.268, -1.499, 1.268, 2.007, -4.376, -1.985, -0.128, 2.543, -3.074, 0.118,
                1.364, -2.054, -0.158, 0.288, -0.648, 1.608, 3.094, 1.211, -1.347, -1.425, -1.382, 0.462,
            ],
            bias: Some([-0.044, 0.236, 0.284, -0.334, 0.507, -0.268, -0.107, 0.37]),
            dweight: [-1.201, 1.265, 0.36, 0.634, -0.62, 0.574, -0.08, 0.967, -0.776],
            expert: [4, 5, 1, 1, 7, 0, 2, 1, 3],
            weight: [1.0654373, 1.2035043, 0.23105846, 1.1785282, 0.7264967, 0.5949752, 0.9341306, 0.8135263, 0.7523432],
            dlogits: [
                0.0, 0.044070672, 0.0, 0.0, -0.3115097, 0.16176887, 0.0, 0.0,
                0.10086571, 0.032534253, 0.0, 0.0, 0.0, 0.0, 0.0, -0.27248323,
                0.0, 0.124312975, -0.005315674, -0.14285076, 0.0, 0.0, 0.0, 0.0,
            ],
        },
    ]
}

#[test]
fn routers_of_deepseek_choose_and_weigh_as_transformers_has_it() {
    let cpu = Cpu::new(1).unwrap();
    for Vectors { rule, logits, bias, dweight, expert, weight, dlogits } in vectors() {
        let logits = &Tensor::from_f32(&cpu, &logits, 3, 8).unwrap();
        let bias = bias.map(|bias| cpu.upload(&bias).unwrap());
        let routing =
            Route { logits, bias: bias.as_ref(), rule, shards: 1, documents: None }.run(&cpu).unwrap();
        assert_eq!(routing.expert.as_slice(), expert, "{rule:?}");
        let close = |got: &[f32], want: &[f32]| {
            got.iter().zip(want).all(|(a, b)| (a - b).abs() <= 2e-6 * b.abs().max(0.5))
        };
        assert!(close(routing.weight.as_slice(), &weight), "{rule:?}: {:?}", routing.weight.as_slice());
        let op = RouteBackward {
            routing: &routing,
            rule,
            shards: 1,
            dweight: &cpu.upload(&dweight).unwrap(),
            aux_scale: 0.0,
            documents: None,
            batch_load: None,
            batch_rows: 0,
            z_scale: 0.0,
        };
        let got = op.run(&cpu).unwrap().to_f32_vec(&cpu).unwrap();
        assert!(close(&got, &dlogits), "{rule:?}: {got:?}");
    }
}
