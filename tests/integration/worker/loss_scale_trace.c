/* The dynamic loss scale over many steps, to be compared with another one: `loss_scale_trace
 * INITIAL MIN WINDOW HYSTERESIS` reads a digit a step, 1: it overflowed, and prints the state after
 * it. */
#include <stdio.h>
#include <stdlib.h>
#include "worker/model/loss_scale.h"

int main(int argc, char **argv)
{
    struct mb_loss_scale s;
    struct mb_err err;
    if (argc != 5)
        return 64;
    const struct mb_loss_scale_config c = {.is_dynamic = 1,
                                           .initial = strtod(argv[1], NULL),
                                           .min = strtod(argv[2], NULL),
                                           .window = strtoll(argv[3], NULL, 10),
                                           .hysteresis = strtoll(argv[4], NULL, 10)};
    if (mb_loss_scale_check(&c, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        return 64;
    }
    mb_loss_scale_start(&s, &c);
    for (int digit; (digit = getchar()) != EOF;)
        if (digit == '0' || digit == '1') {
            mb_loss_scale_update(&s, &c, digit == '1');
            printf("%.17g %lld %lld\n", s.scale, (long long)s.n_good, (long long)s.patience);
        }
    return 0;
}
